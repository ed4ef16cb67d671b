"""The formats that ship, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from subten.errors import UnknownFormatError
from subten.formats.spec import KVFormat, TensorFormat

DEFAULT_FORMAT = "kv2"
SINKS, RECENT = 64, 128

_WIDE = TensorFormat(bits=16, code="wide")
_WIDE32 = TensorFormat(bits=32, code="wide")
_FP8 = TensorFormat(bits=8, code="e4m3", fit="absmax")
_INT4 = TensorFormat(bits=4, fit="absmax", group=64)
_PLAIN_V2 = TensorFormat(bits=2, offset=True, affine="packed", transform="hadamard")
_PLAIN_K2 = replace(_PLAIN_V2, kept_pairs=1)
_V2 = replace(_PLAIN_V2, rounding="shaped")
_V4 = replace(_V2, bits=4, affine="fp16")
_K2, _K4 = (replace(v, kept_pairs=1, transform="whitened", remove_mean=True) for v in (_V2, _V4))
_KIVI_K = TensorFormat(bits=2, fit="clip_search", axis="channel", offset=True)
_KIVI_V = TensorFormat(bits=2, fit="clip_search", group=64, offset=True)
_ARTICLE = TensorFormat(
    bits=2,
    code="levels",
    fit="absmax",
    group=64,
    kept_fraction=0.01,
    level_values=(-1.0, -0.33, 0.33, 1.0),
)


def _catalog(*formats: KVFormat) -> Mapping[str, KVFormat]:
    return MappingProxyType({f.name: f for f in formats})


FORMATS: Mapping[str, KVFormat] = _catalog(
    KVFormat("bf16", _WIDE, _WIDE, 0, 0, "16 bit, nothing coded: the baseline"),
    KVFormat("fp32", _WIDE32, _WIDE32, 0, 0, "32 bit, nothing coded: exact on a float32 model"),
    KVFormat("fp8", _FP8, _FP8, 0, 0, "e4m3 with one scale per token and head"),
    KVFormat("int4", _INT4, _INT4, SINKS, RECENT, "symmetric uniform 4 bit, groups of 64 channels"),
    KVFormat("kv4", _K4, _V4, SINKS, RECENT, "4 bit with offset, one key pair in 16 bit, calibrated rounding"),
    KVFormat("kv2", _K2, _V2, SINKS, RECENT, "2 bit with offset, one key pair in 16 bit, calibrated rounding"),
    KVFormat("k4v2", _K4, _V2, SINKS, RECENT, "keys as in kv4, values as in kv2"),
    KVFormat("kv2-plain", _PLAIN_K2, _PLAIN_V2, SINKS, RECENT, "as kv2, each element to its nearest level"),
    KVFormat("kivi2", _KIVI_K, _KIVI_V, SINKS, RECENT, "KIVI: keys per channel over 64 tokens, values per token"),
    KVFormat(
        "article2",
        _ARTICLE,
        _ARTICLE,
        SINKS,
        RECENT,
        "levels -1, -0.33, 0.33, 1 times absmax, top 1% in a dense 16-bit plane (for reference only)",
    ),
)


def get_format(name: str, sinks: int | None = None, recent: int | None = None) -> KVFormat:
    """A format by name, or `KEYS:VALUES` to take keys and values from two formats (`kv4:kv2`).

    Raises:
        UnknownFormatError: no such format, or windows that make no sense.
    """
    if name in FORMATS:
        return FORMATS[name].with_windows(sinks, recent)
    key_name, colon, value_name = name.partition(":")
    if not colon or key_name not in FORMATS or value_name not in FORMATS:
        raise UnknownFormatError(
            f"there is no KV format '{name}'; choose one of {', '.join(FORMATS)}, or KEYS:VALUES such as kv4:kv2"
        )
    key, value = FORMATS[key_name], FORMATS[value_name]
    if (key.wide_bits, key.key.coded) != (value.wide_bits, value.value.coded):
        raise UnknownFormatError(
            f"'{name}' mixes {key.wide_bits}-bit or uncoded keys with other values; keys and values "
            "must both be coded"
        )
    mixed = KVFormat(
        name,
        key.key,
        value.value,
        max(key.sinks, value.sinks),
        max(key.recent, value.recent),
        f"keys as in {key_name}, values as in {value_name}",
    )
    return mixed.with_windows(sinks, recent)
