"""Builders, strategies and slow independent definitions that several test folders share."""
