"""How answers are constrained and parsed, in the formats of the served model."""
