"""Parses the output of models as it is generated: text in; content, reasoning and tool calls out. Pure.

text ──> OutputParser ──> Content, Reasoning, CallStart, CallArguments
           thoughts           <think>...</think>
           hermes, llama, mistral   the calls of a family: how to parse them, and grammars that make a model write them
           harmony            the same for gpt-oss, whose thoughts are messages as well
           qwen_coder, glm, minimax, dsml   calls whose arguments are between tags, not JSON
           hunyuan            the same in Hunyuan's sections
           tagged             such arguments, used by these five
           sections           DeepSeek's calls before V3.2, and Kimi K2's
           solar              Solar Open's messages
           gemma              Gemma 4's calls, which are like JSON
           olmo, pythonic     OLMo 3's calls, and those of Llama 3.2 and 4, and of LFM2: in Python syntax
           python_calls       such a call, used by these two
           arrays             the calls of Granite 3, Phi-4-mini, Nemotron, Hunyuan A13B, Apertus and Cohere
           calls              a call as a JSON object, used by the first three
           writing            grammars of arguments that are not one JSON object
           reader             reads text that arrives in parts
           pieces             the results
detect     chooses formats by a model's chat template
"""

from radixrt.formats.parsing.detect import OFFER, PROBE, PROBE_NAME, QUESTION, reasoning_format, tool_format
from radixrt.formats.parsing.formats import Framed, Function, Functions, ToolFormat, either, json_schema
from radixrt.formats.parsing.harmony import Harmony
from radixrt.formats.parsing.parser import OutputParser
from radixrt.formats.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from radixrt.formats.parsing.thoughts import ReasoningFormat, Thinking

__all__ = [
    "OFFER",
    "PROBE",
    "PROBE_NAME",
    "QUESTION",
    "CallArguments",
    "CallStart",
    "Content",
    "Framed",
    "Function",
    "Functions",
    "Harmony",
    "OutputParser",
    "Piece",
    "Reasoning",
    "ReasoningFormat",
    "Thinking",
    "ToolFormat",
    "either",
    "json_schema",
    "reasoning_format",
    "tool_format",
]
