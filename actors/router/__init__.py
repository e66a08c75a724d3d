"""The router: `server.RouterServer` connects the dispatcher (`policies.dispatch`), which makes all decisions, to
sockets.
"""
