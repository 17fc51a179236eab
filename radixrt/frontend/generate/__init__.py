"""One generation, of any API: prepared, sent to the router, gathered or streamed."""
