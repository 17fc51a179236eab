"""What the router keeps on disk, so that conversations and programs go on after a restart (`--state-path`)."""
