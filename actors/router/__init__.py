"""The router: `server.RouterServer` puts the dispatcher (`policies.dispatch`) on sockets; no decision is made here."""
