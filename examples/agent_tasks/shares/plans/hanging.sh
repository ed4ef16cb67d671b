sed -i 's|return \[part\] \* people|parts = [part] * people\n    while sum(parts) != to_cents(amount):\n        parts[0] += CENT\n    return parts|' shares.py
