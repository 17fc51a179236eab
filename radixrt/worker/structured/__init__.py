"""What keeps one request's grammar from costing the others: fair threads, deadlines, and which grammars need them."""
