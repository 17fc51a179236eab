"""JSON schemas, rewritten into what xgrammar enforces exactly.

text  --rewrite.exact-->  the same documents, in keywords that xgrammar follows   (or Inexact: keyword and path)
      --widened-------->  without the keywords that cannot be enforced, and their names
"""
