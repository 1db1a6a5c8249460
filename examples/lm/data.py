"""Bytes of text, and which of them a step reads."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from lm.errors import UsageError

# One file in so many is kept from training.
VALIDATION_SHARE = 20
# Between two files; a byte that source text does not contain.
SEPARATOR = b"\0"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation text as one-dimensional uint8 tensors."""

    train: Tensor
    validation: Tensor
    source: str
    fingerprint: str


def load_corpus(path: Path | None) -> Corpus:
    """Reads a file, a folder, or the source of the Python standard library.

    Whole files go to training or to validation, so that validation text is never a continuation
    of training text; a single file is cut once, its end is for validation.

    Args:
        path: a file, or a folder of which every readable file is taken; ``None`` for the
            ``*.py`` files of the running interpreter's standard library.

    Raises:
        UsageError: there is no text at ``path``.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if "site-packages" not in f.parts]
        source = f"Python {sysconfig.get_python_version()} standard library"
    else:
        root, source = path, str(path)
        files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
    if not root.exists():
        raise UsageError(f"--data {root}: there is no such file or folder")
    # Sorted by name relative to the root, so that every rank and every run sees one order.
    texts = [f.read_bytes() for f in sorted(files, key=lambda f: f.relative_to(root).as_posix())]
    if sum(map(len, texts)) < 2:
        raise UsageError(f"no text found at {root}: give --data a file or a folder with files")
    if len(texts) < VALIDATION_SHARE:
        text = SEPARATOR.join(texts)
        cut = len(text) - len(text) // VALIDATION_SHARE
        train, validation = text[:cut], text[cut:]
    else:
        validation = SEPARATOR.join(texts[::VALIDATION_SHARE])
        train = SEPARATOR.join(t for i, t in enumerate(texts) if i % VALIDATION_SHARE)
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        source=source,
        fingerprint=hashlib.sha256(train + validation).hexdigest()[:16],
    )


class BatchReader:
    """Cuts batches whose content depends on the step alone.

    The global batch of a step is the same for any number of ranks and whatever was read before,
    so that a run can be stopped, resumed and moved to other world sizes.
    """

    def __init__(self, text: Tensor, length: int, batch_size: int, seed: int) -> None:
        """Prepares reading.

        Args:
            text: (bytes,), uint8.
            length: tokens of a sequence.
            batch_size: sequences of a global batch.
            seed: another seed gives other batches.

        Raises:
            UsageError: the text is shorter than one sequence and its target.
        """
        if len(text) < length + 1:
            raise UsageError(f"a text of {len(text)} bytes has no sequence of {length} tokens")
        self._text = text
        self._length = length
        self._batch_size = batch_size
        self._seed = seed

    def read(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, each (batch_size / parts, length) and int64.

        Args:
            step: counts batches.
            part: which of the ``parts`` equal parts of the global batch.
            parts: ranks times microbatches; must divide the batch size.

        Raises:
            UsageError: ``parts`` does not divide the batch size.
        """
        if self._batch_size % parts:
            raise UsageError(
                f"a batch of {self._batch_size} sequences cannot be cut into {parts} equal parts "
                "(ranks times accumulated microbatches)"
            )
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        last = len(self._text) - self._length
        starts = torch.randint(last, (self._batch_size,), generator=generator)
        size = self._batch_size // parts
        rows = starts[part * size : (part + 1) * size, None] + torch.arange(self._length + 1)
        tokens = self._text[rows].to(torch.int64)
        return tokens[:, :-1], tokens[:, 1:]
