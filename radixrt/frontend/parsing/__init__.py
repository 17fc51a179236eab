"""What models write, read as it comes: text in; content, reasoning and tool calls out. Pure.

text ──> OutputParser ──> Content, Reasoning, CallStart, CallArguments
           thoughts           <think>...</think>
           hermes, llama, mistral   one family's calls each: how to read them, and how to make a model write them
           harmony            the same of gpt-oss, whose thoughts are messages as well
           qwen_coder, glm, minimax   calls whose arguments are no JSON, but between tags
           tagged             such arguments, the core of these three
           sections           DeepSeek's and Kimi K2's calls
           olmo               OLMo 3's calls, which are as in Python
           arrays             Granite 3's, Phi-4-mini's and Nemotron's calls
           calls              a call as a JSON object, the core of the first three
           reader             text in cuts as if it were whole
           pieces             what comes out
detect     which of them a model's chat template asks for
"""

from radixrt.frontend.parsing.detect import PROBE, QUESTION, reasoning_format, tool_format
from radixrt.frontend.parsing.formats import Function, Functions, ToolFormat, either, json_schema
from radixrt.frontend.parsing.harmony import Harmony
from radixrt.frontend.parsing.parser import OutputParser
from radixrt.frontend.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from radixrt.frontend.parsing.thoughts import ReasoningFormat, Thinking

__all__ = [
    "PROBE",
    "QUESTION",
    "CallArguments",
    "CallStart",
    "Content",
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
