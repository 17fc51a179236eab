"""Which worker a request goes to: what each has cached, and what it costs there."""
