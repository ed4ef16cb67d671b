"""Every exception a user can see. One base class, one stable `code` each; docs/errors.md lists them all.

The message is one sentence that says what was wrong and what would be right. The command line prints it and
leaves with `exit_code`; a traceback reaching a user is a bug.
"""

from __future__ import annotations

from typing import ClassVar


class SubtenError(Exception):
    """Base of all errors caused by input, environment or resources rather than by a bug."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2


class UnknownFormatError(SubtenError):
    """A KV format name that does not exist, or a window or override that the format cannot take."""

    code = "unknown_format"


class PageFormatError(SubtenError):
    """Page bytes that were written by another version, for another layout, or damaged."""

    code = "page_format"


class UnknownArchitectureError(SubtenError):
    """A checkpoint whose architecture, or a feature of it, is not supported."""

    code = "unknown_architecture"


class CheckpointError(SubtenError):
    """A model file that is truncated, corrupt, incomplete, or holds tensors that do not fit its configuration."""

    code = "checkpoint"


class ModelNotFoundError(SubtenError):
    """A model name or path that leads to no checkpoint."""

    code = "model_not_found"


class FetchError(SubtenError):
    """A model that could not be fetched, or whose fetched bytes have the wrong checksum."""

    code = "fetch"


class StorageError(SubtenError):
    """A folder or file that could not be read or written."""

    code = "storage"


class CalibrationError(SubtenError):
    """A calibration that belongs to another model or format."""

    code = "calibration"


class KernelUnavailableError(SubtenError):
    """A kernel implementation that was asked for by name and cannot run here."""

    code = "kernel_unavailable"


class ContextLengthError(SubtenError):
    """A prompt, or a prompt with its requested continuation, that is longer than the context."""

    code = "context_length"


class CacheMemoryError(SubtenError):
    """A cache that does not fit into memory, or a request that does not fit into the cache."""

    code = "cache_memory"


class ParameterError(SubtenError):
    """A sampling or evaluation parameter outside its range."""

    code = "parameter"


class NumericalError(SubtenError):
    """A forward pass that produced NaN or infinite logits for a request."""

    code = "numerical"


class GuardError(SubtenError):
    """An answer that can't go on in the form that it is held to, or whose guard has failed."""

    code = "guard"


class EngineStoppedError(SubtenError):
    """An engine that is closed, or has failed, and takes no more requests."""

    code = "engine_stopped"


class QualityError(SubtenError):
    """A KV format diverges from 16 bit by more than was allowed."""

    code = "quality"


class PolicyError(SubtenError):
    """A policy file, or a rule file that it imports, that can't be read or contradicts itself."""

    code = "policy"


class ExtraMissingError(SubtenError):
    """A package that an optional part of the project needs is not installed."""

    code = "extra_missing"


class SandboxError(SubtenError):
    """A sandbox that can't be started here, was ended, or no longer answers; a file that can't be moved in or out."""

    code = "sandbox"


class ProposerError(SubtenError):
    """A model or endpoint that was to propose plans and can't be reached, refuses, or breaks off."""

    code = "proposer"
