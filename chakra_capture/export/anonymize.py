"""Names, shapes and types hidden before anything is written: times, structure, kinds and sizes stay.

A text becomes the same hash wherever it stands, in every rank of one export, and nobody without the key of the export
can tell which texts it may be: the key is random, and forgotten. Dimensions of shapes are rounded up to powers of two.
What the tools that read an export go by stays as it is: roots of threads, steps, which collective a kernel runs.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import polars as pl

from chakra_capture.annotations import parse_step
from chakra_capture.merge.collectives import kernel_collective

_KEY_BYTES, _HASH_BYTES = 16, 5
_STRUCTURE = (
    re.compile(r"\[pytorch\|profiler\|execution_(?:trace|graph)\|(?:process|thread)\]"),
    re.compile(r"record_param_comms|## process_group:init ##"),
    re.compile(r"(?:gloo|nccl|c10d)::?_?[a-z_]{1,40}"),  # operations of communication
)
_NUMBER, _WORD = re.compile(r"\d+"), re.compile(r"[A-Za-z_][\w.:<>*&]*")
# Words of Kineto and of the observer for types of inputs.
_TYPE_WORDS = frozenset((
    "Tensor", "GenericList", "Tuple", "Dict", "None", "Int", "Double", "Bool", "Scalar", "String", "Device",
    "Stream", "Generator", "ScalarType", "Layout", "float", "double", "int", "long", "short", "half", "bool", "char",
    "byte", "signed", "unsigned", "c10::BFloat16", "c10::Half", "c10::complex<float>", "c10::complex<double>",
    "c10::Float8_e4m3fn", "c10::Float8_e5m2", "nullptr", "uninitialized", "ScalarList", "TensorList", "List",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Anonymizer:
    """Hides texts; one for all ranks of an export.

    Attributes:
        key: what hashes depend on.
    """

    key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES))

    def hashed(self, text: str) -> str:
        """The hash of a text."""
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self.key, digest_size=_HASH_BYTES).hexdigest()

    def name(self, text: str) -> str:
        """A name as it is written: its hash; of a kernel that communicates, behind the name of its collective."""
        if parse_step(text) is not None or any(one.fullmatch(text) for one in _STRUCTURE):
            return text
        collective = kernel_collective(text, None)
        if collective is None:
            return f"n{self.hashed(text)}"
        return f"ncclDevKernel_{collective.title().replace('_', '')}_{self.hashed(text)}"

    def shapes(self, text: str) -> str:
        """Shapes with every dimension rounded up to a power of two; brackets stay, all else goes."""
        coarse = _NUMBER.sub(lambda found: str(_coarse(found[0])), text)
        return re.sub(r"[^\d\[\],\s]+", "", coarse)

    def types(self, text: str) -> str:
        """Types of torch's own; the names of others as hashes."""
        return _WORD.sub(lambda found: found[0] if found[0] in _TYPE_WORDS else f"t{self.hashed(found[0])}", text)

    def group(self, text: str) -> str:
        """A process group: a number stays."""
        return text if text.isdecimal() else f"g{self.hashed(text)}"

    def nodes(self, table: pl.DataFrame) -> pl.DataFrame:
        """The same rows of the table nodes with their texts hidden; ``args`` keeps nothing."""
        ways: dict[str, Callable[[str], str]] = {
            "name": self.name, "input_shapes": self.shapes, "input_types": self.types, "process_group": self.group,
        }  # fmt: skip
        found = [_replaced(table[name], ways[name]) for name in ways if name in table.columns]
        table = table.with_columns(found)
        return table.with_columns(pl.lit("{}").alias("args")) if "args" in table.columns else table


def _replaced(column: pl.Series, way: Callable[[str], str]) -> pl.Series:
    texts = column.drop_nulls().unique()
    return column.replace_strict(texts, _all(way, texts.to_list()), default=None, return_dtype=pl.String)


def _all(way: Callable[[str], str], texts: Iterable[str]) -> pl.Series:
    return pl.Series([way(text) for text in texts], dtype=pl.String)


def _coarse(digits: str) -> int:
    number = int(digits[:18])
    return number if number < 2 else 1 << (number - 1).bit_length()
