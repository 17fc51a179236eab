"""Text to token ids and back: tokenizers, chat templates, incremental detokenization, stop strings.

    prompt --TextService.encode--> ids ... generated ids --TextStream.push--> text, stop

The only folder that imports tokenizers, sentencepiece and transformers.
"""

from radixrt.router.tokens._ids import parse_ids
from radixrt.router.tokens.detok import Detokenizer
from radixrt.router.tokens.text import TextService, TextStream
from radixrt.router.tokens.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "TextService", "TextStream", "Tokenizer", "load_tokenizer", "parse_ids"]
