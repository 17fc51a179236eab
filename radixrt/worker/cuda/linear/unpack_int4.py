"""Expands weights in INT4 (`layers.int4`) in registers: a word has 8 values, and each belongs to another slice of WORDS
columns, so a thread expands its own words, without data of other threads."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl


def expansion(one: int, magic: int, kind: str, select: str, numbers: Sequence[int] = range(4)) -> tl.constexpr:
    """PTX that expands these of the four values in a half of two words of w, each to a pair of (q - zero) * scale: with
    an exponent above it, q is the number magic + q, exactly, and so is its difference to magic + zero. Operands: the
    pairs, the words, and for each value its scale and -(magic + zero), of both words."""
    count = len(numbers)
    lines = ["{", ".reg .b32 half, q, one, nothing;"]
    lines += [
        f"mov.b32 one, 0x{one:04X}{one:04X};",
        "mov.b32 nothing, 0x80008000;",
        f"prmt.b32 half, ${count}, ${count + 1}, {select};",
    ]
    for place, number in enumerate(numbers):
        if number:
            lines.append(f"shr.b32 q, half, {4 * number};")
        lines.append(f"lop3.b32 q, {'q' if number else 'half'}, 0x000F000F, 0x{magic:04X}{magic:04X}, 0xEA;")
        lines.append(f"fma.rn.{kind} q, q, one, ${count + 4 + 4 * place};")
        lines.append(f"fma.rn.{kind} ${place}, q, ${count + 2 + 4 * place}, nothing;")
    return tl.constexpr("\n".join([*lines, "}"]))


LESS16: tl.constexpr = tl.constexpr(0xE400E400 - (1 << 32))
LESS: tl.constexpr = tl.constexpr(0xC300C300 - (1 << 32))
"""-1024 in float16 and -128 in bfloat16, twice, to whose lowest bits a zero is added."""
LOW16, HIGH16 = (expansion(0x3C00, 0x6400, "f16x2", select) for select in ("0x5410", "0x7632"))
LOW, HIGH = (expansion(0x3F80, 0x4300, "bf16x2", select) for select in ("0x5410", "0x7632"))
REGISTERS: tl.constexpr = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 18))


@triton.jit
def load_facts(facts_at, stride, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """The words of a row's facts, `stride` apart: four with scales and two with zeros; in place of those that there are
    not, others."""
    f0 = tl.load(facts_at)
    f1, f2, f3, f4, f5 = f0, f0, f0, f0, f0
    if GROUPS >= 4:
        f1 = tl.load(facts_at + stride)
    if GROUPS == 8:
        f2 = tl.load(facts_at + stride * 2)
        f3 = tl.load(facts_at + stride * 3)
    if ZEROS:
        f4 = tl.load(facts_at + stride * (GROUPS // 2))
        if GROUPS == 8:
            f5 = tl.load(facts_at + stride * (GROUPS // 2 + 1))
    return f0, f1, f2, f3, f4, f5


@triton.jit
def _scale(facts, number: tl.constexpr, GROUPS: tl.constexpr):
    """The bits of the scale of the values at place `number` of the words."""
    group: tl.constexpr = number * GROUPS // 8
    return tl.expand_dims((facts[group // 2] >> (16 * (group % 2))) & 0xFFFF, -1)


@triton.jit
def _zero(facts, number: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr):
    """Their zero."""
    group: tl.constexpr = number * GROUPS // 8
    if ZEROS:
        return tl.expand_dims((facts[4 + group // 4] >> (8 * (group % 4))) & 0xFF, -1)
    else:
        return tl.expand_dims(facts[0] * 0 + MIDDLE, -1)


@triton.jit
def operands(
    facts, number: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr, LESS: tl.constexpr
):  # fmt: skip
    """The scale of the values at place `number`, and -(magic + zero), both twice in a word."""
    s, z = _scale(facts, number, GROUPS), _zero(facts, number, GROUPS, ZEROS, MIDDLE)
    return s | (s << 16), z | (z << 16) | LESS


@triton.jit
def _value(
    w, facts, number: tl.constexpr, dtype: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """The values at place `number` of the words: as by `expansion`, in plain arithmetic."""
    scale, zero = _scale(facts, number, GROUPS), _zero(facts, number, GROUPS, ZEROS, MIDDLE)
    q = ((w >> (4 * number)) & 15) - zero
    if dtype == tl.float16:
        factor = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        factor = (scale << 16).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * factor).to(dtype)


@triton.jit
def unpack_int4(
    w, facts, dtype: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr
):  # fmt: skip
    """The weights of words w[N, WORDS], with `load_facts` [N]: 8 slices [N, WORDS], of the block's first WORDS columns,
    the next ones, ..."""
    if BITS:
        less: tl.constexpr = LESS16 if dtype == tl.float16 else LESS
        s0, z0 = operands(facts, 0, GROUPS, ZEROS, MIDDLE, less)
        s1, z1 = operands(facts, 1, GROUPS, ZEROS, MIDDLE, less)
        s2, z2 = operands(facts, 2, GROUPS, ZEROS, MIDDLE, less)
        s3, z3 = operands(facts, 3, GROUPS, ZEROS, MIDDLE, less)
        s4, z4 = operands(facts, 4, GROUPS, ZEROS, MIDDLE, less)
        s5, z5 = operands(facts, 5, GROUPS, ZEROS, MIDDLE, less)
        s6, z6 = operands(facts, 6, GROUPS, ZEROS, MIDDLE, less)
        s7, z7 = operands(facts, 7, GROUPS, ZEROS, MIDDLE, less)
        if dtype == tl.float16:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                LOW16, REGISTERS, [w, s0, z0, s1, z1, s2, z2, s3, z3], dtype=(tl.float16,) * 4, is_pure=True, pack=2
            )
            w4, w5, w6, w7 = tl.inline_asm_elementwise(
                HIGH16, REGISTERS, [w, s4, z4, s5, z5, s6, z6, s7, z7], dtype=(tl.float16,) * 4, is_pure=True, pack=2
            )
        else:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                LOW, REGISTERS, [w, s0, z0, s1, z1, s2, z2, s3, z3], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
            w4, w5, w6, w7 = tl.inline_asm_elementwise(
                HIGH, REGISTERS, [w, s4, z4, s5, z5, s6, z6, s7, z7], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
        return w0, w1, w2, w3, w4, w5, w6, w7
    else:
        w0 = _value(w, facts, 0, dtype, GROUPS, ZEROS, MIDDLE)
        w1 = _value(w, facts, 1, dtype, GROUPS, ZEROS, MIDDLE)
        w2 = _value(w, facts, 2, dtype, GROUPS, ZEROS, MIDDLE)
        w3 = _value(w, facts, 3, dtype, GROUPS, ZEROS, MIDDLE)
        w4 = _value(w, facts, 4, dtype, GROUPS, ZEROS, MIDDLE)
        w5 = _value(w, facts, 5, dtype, GROUPS, ZEROS, MIDDLE)
        w6 = _value(w, facts, 6, dtype, GROUPS, ZEROS, MIDDLE)
        w7 = _value(w, facts, 7, dtype, GROUPS, ZEROS, MIDDLE)
        return w0, w1, w2, w3, w4, w5, w6, w7


def by_instructions() -> bool:
    """Whether words are expanded by `expansion`."""
    return not triton.knobs.runtime.interpret
