"""Text to token ids and back: tokenizers, chat templates, incremental detokenization, stop strings.

    prompt --TextService.encode--> ids ... generated ids --OutputProcessor.take--> text, stop
    chat --Sessions.encode_chat--> ids with answers as generated <--Sessions.remember-- message, ids

`incremental.py` encodes only text that was not seen before; `cuts.py` proves where a text can be cut without changing
its ids.

The only folder that imports tokenizers, sentencepiece and transformers.
"""

from radixrt.tokens._ids import cut_ids, ids_below, parse_ids
from radixrt.tokens.detok import Detokenizer
from radixrt.tokens.output import OutputProcessor
from radixrt.tokens.sessions import Encoded, Sessions
from radixrt.tokens.text import TextService
from radixrt.tokens.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Detokenizer",
    "Encoded",
    "OutputProcessor",
    "Sessions",
    "TextService",
    "Tokenizer",
    "cut_ids",
    "ids_below",
    "load_tokenizer",
    "parse_ids",
]
