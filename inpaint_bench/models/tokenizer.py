"""Text to token ids, by the weights' own tokenizer or, without weights, by a hash."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inpaint_bench.core.errors import UserError

Tokenize = Callable[[list[str]], Tensor]  # T texts -> [T, L] int64


def hash_tokenizer(vocab_size: int, length: int) -> Tokenize:
    """Deterministic stand-in for CLIP's tokenizer, for random weights: the same shapes, no files, no meaning.

    Words (letters, digits) and single other marks, in lower case, become CRC-32 modulo `vocab_size - 2`. As
    in CLIP the last two ids of the vocabulary begin and end the text, the end also fills up to `length`, and
    what is too long is cut. Different words can collide: with random embeddings that changes nothing.
    """
    begin, end = vocab_size - 2, vocab_size - 1

    def encode(text: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", text.lower())[: length - 2]
        ids = [begin, *(zlib.crc32(word.encode()) % (vocab_size - 2) for word in words), end]
        return ids + [end] * (length - len(ids))

    return lambda texts: torch.tensor([encode(text) for text in texts], dtype=torch.int64)


def folder_tokenizer(folder: Path, length: int) -> Tokenize:
    """The CLIP tokenizer in `folder`. Raises UserError where it cannot be loaded."""
    from transformers import CLIPTokenizer

    try:
        tokenizer: Any = CLIPTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.weights: the tokenizer in {folder} cannot be loaded ({reason})") from None

    def tokenize(texts: list[str]) -> Tensor:
        result = tokenizer(texts, padding="max_length", truncation=True, max_length=length)
        return torch.tensor(result["input_ids"], dtype=torch.int64)

    return tokenize
