"""`make demo`: a small model made on the spot, a branching program, a chat over HTTP, the hit-rate report."""
