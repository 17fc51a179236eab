"""The live page's data: what the router does now, as a stream of events, and why requests missed the cache.

page --fetch--> LiveRoutes --subscribe--> Feed, one for a key --Live, once a second--> router
"""
