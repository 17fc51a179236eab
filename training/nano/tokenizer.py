"""The tokenizer: sentencepiece's BPE, in which a space, a digit and a line feed are pieces of their own.

So a word has the same ids wherever it stands (behind a space, a quote, a bracket), and copying it is copying ids. The
folder gets `tokenizer.model` and a `tokenizer.json` that says the same; transformers and radixrt read the latter.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from training.nano.render import BOS, END, MARKS, turns_of
from training.nano.tasks import TAGS, Words, draw

VOCAB_SIZE = 2048
UNKNOWN, PAD = "<unk>", "<pad>"
CONTROLS = (*MARKS.values(), END)
SHOWN = ("<tool_call>", "</tool_call>")
"""Marks that a reader of the text needs: one piece each, but not hidden as special tokens are."""
SPACE = "\u2581"
PIECES = (*SHOWN, SPACE, "\n")
TEMPLATE = Path(__file__).with_name("template.jinja")
ROUNDS = 400


def training_text(seed: int = 0) -> Iterator[str]:
    """Lines of training examples of every kind, short contexts only."""
    words = Words(random.Random(seed), "train")
    for _ in range(ROUNDS):
        for kind, tags in TAGS.items():
            for tag in tags[:1] if kind.startswith("recall") else tags:
                for _, text in turns_of(draw(words, kind, tag)):
                    yield from text.split("\n")
    # What no task writes: every printable character, and a little of the words that people write.
    for _ in range(20):
        yield " ".join(map(chr, range(33, 127)))
        yield "the of and to a in is it you that he was for on are with as I his they be at one have this from or"


def train() -> bytes:
    """The sentencepiece model, the same every time."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training_text()),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        character_coverage=1.0,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        unk_id=0, bos_id=1, eos_id=-1, pad_id=2, unk_piece=UNKNOWN, bos_piece=BOS, pad_piece=PAD,
        control_symbols=list(CONTROLS),
        user_defined_symbols=list(PIECES),
        num_threads=1,
        minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def write(folder: Path, model: bytes) -> None:
    """All tokenizer files of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    as_json(sp).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    _write_json(folder / "tokenizer_config.json", config)
    ids = {"bos_token_id": sp.bos_id(), "eos_token_id": sp.piece_to_id(END), "pad_token_id": sp.pad_id()}
    _write_json(folder / "generation_config.json", ids | {"do_sample": False})


def as_json(sp: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    """The same as a `tokenizers` BPE: a merge for every pair of pieces that makes a piece, in the order of scores."""
    pieces = [sp.id_to_piece(i) for i in range(sp.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    apart = {*CONTROLS, *PIECES, UNKNOWN, BOS, PAD}
    plain = [i for i, piece in enumerate(pieces) if piece not in apart and not sp.is_byte(i)]
    mergeable = {pieces[i] for i in plain}
    merges = []
    for i in sorted(plain, key=sp.get_score, reverse=True):
        piece = pieces[i]
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [pair for pair in splits if mergeable.issuperset(pair)]
    bpe = models.BPE(vocab, merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, sp.bos_id())]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in (UNKNOWN, BOS, PAD, *CONTROLS)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in SHOWN])
    return tokenizer


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
