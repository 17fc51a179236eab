"""OpenAI's completions and chat APIs."""
