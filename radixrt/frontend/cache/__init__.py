"""The routes by which clients give hints to the cache, and the field of a request that does."""
