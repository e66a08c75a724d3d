"""The router: `server.RouterServer` puts `policies.dispatch.Dispatcher` on sockets; no decision is made here."""
