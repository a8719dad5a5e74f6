"""Text to token ids: the weights' own tokenizer of CLIP or T5, or a hash if weights are random."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inpaint_bench.core.errors import UserError, first_line

Tokenize = Callable[[list[str]], Tensor]  # T texts -> [T, L] int64
BYTES = 256


def hash_tokenizer(vocab_size: int, length: int) -> Tokenize:
    """Return a deterministic stand-in for CLIP's tokenizer, for random weights: same shapes, no files, no meaning.

    Words (letters, digits) and other single characters, in lower case, become CRC-32 modulo `vocab_size - 2`. As in
    CLIP the last two ids of the vocabulary start and end the text, the end also pads it to `length`, and longer texts
    are cut. Different words may collide: with random embeddings that changes nothing.
    """
    start, end = vocab_size - 2, vocab_size - 1

    def encode(text: str) -> list[int]:
        words = re.findall(r"\w+|[^\w\s]", text.lower())[: length - 2]
        ids = [start, *(zlib.crc32(word.encode()) % (vocab_size - 2) for word in words), end]
        return ids + [end] * (length - len(ids))

    return lambda texts: torch.tensor([encode(text) for text in texts], dtype=torch.int64)


def load_tokenizer(folder: Path, text_config: Any, length: int | None = None) -> Tokenize:
    """Return the CLIP or T5 tokenizer in `folder`. Raises ValueError if it cannot be loaded or does not fit.

    Texts are padded to `length`, which is that of CLIP's own configuration.
    """
    from transformers import CLIPTokenizer, T5Tokenizer

    kind: Any = T5Tokenizer if text_config.model_type == "t5" else CLIPTokenizer
    size, vocab_size = length or text_config.max_position_embeddings, text_config.vocab_size

    def encode(texts: list[str]) -> Tensor:
        result = tokenizer(texts, padding="max_length", truncation=True, max_length=size)
        return torch.tensor(result["input_ids"], dtype=torch.int64)

    try:
        tokenizer: Any = kind.from_pretrained(str(folder), local_files_only=True)
        # Start, end and padding of an empty text are the highest ids of a CLIP vocabulary, and the lowest of T5's.
        highest = max(int(encode([""]).max()), len(tokenizer) - 1)
    except Exception as error:  # the Rust library behind it raises nothing more specific
        raise ValueError(f"the tokenizer cannot be loaded ({first_line(error)})") from None
    if highest >= vocab_size:
        raise ValueError(f"the tokenizer has ids up to {highest}, the text encoder has {vocab_size} ids")
    return encode


def save_byte_tokenizer(folder: Path, text_config: Any) -> None:
    """Write a CLIP tokenizer without merges: every byte is a token, so it encodes any text and needs no vocabulary.

    Its 512 ids are the first ones; start and end of a text are where `text_config` (CLIPTextConfig) has them. In
    training, random weights come with `hash_tokenizer`: the ids differ from those, which loses nothing, because
    random embeddings mean nothing. Raises UserError for a vocabulary that is too small.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    size = text_config.vocab_size
    if size < 2 * BYTES + 2:
        raise UserError(
            f"text_encoder.vocab_size={size}: saving a pipeline needs at least {2 * BYTES + 2} ids: two per byte "
            "(within and at the end of a word), start and end of the text"
        )
    # The visible character that stands for each byte, as in the vocabularies of GPT-2 and CLIP.
    letters = [letter for _, letter in sorted(bytes_to_unicode().items())]
    start, end = "<|startoftext|>", "<|endoftext|>"
    vocabulary = {letter: i for i, letter in enumerate([*letters, *(f"{letter}</w>" for letter in letters)])}
    vocabulary |= {start: size - 2, end: size - 1}
    settings = {
        "tokenizer_class": "CLIPTokenizer",
        "bos_token": start,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        "model_max_length": text_config.max_position_embeddings,
    }
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    # Readers skip this line, and no merge follows.
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
