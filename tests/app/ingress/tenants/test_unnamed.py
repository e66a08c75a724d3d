"""The tenant of requests without an API key."""

from app.ingress.tenants.unnamed import unnamed_tenant

SALT = b"secret"


def test_a_name_comes_before_an_address_and_neither_is_told() -> None:
    named = unnamed_tenant("alice", "10.0.0.7", SALT)
    assert named == unnamed_tenant("alice", "10.0.0.8", SALT) != unnamed_tenant("bob", "10.0.0.7", SALT)
    assert named.startswith("user-") and "alice" not in named and len(named) == 17
    # whoever lacks the secret cannot guess names by their digests
    assert named != unnamed_tenant("alice", "10.0.0.7", b"other")


def test_without_a_name_the_address_counts_and_of_ipv6_its_network() -> None:
    one = unnamed_tenant("", "10.0.0.7", SALT)
    assert one.startswith("address-") and one != unnamed_tenant("", "10.0.0.8", SALT)
    assert one == unnamed_tenant("", "::ffff:10.0.0.7", SALT)
    assert unnamed_tenant("", "2001:db8:1:2::1", SALT) == unnamed_tenant("", "2001:db8:1:2:9::f", SALT)
    assert unnamed_tenant("", "2001:db8:1:2::1", SALT) != unnamed_tenant("", "2001:db8:1:3::1", SALT)
    assert unnamed_tenant("", "no address", SALT).startswith("address-")
    # a Unix socket has no address, and a user cannot pass for one
    assert unnamed_tenant("", "", SALT) == ""
    assert unnamed_tenant("10.0.0.7", "", SALT) != one
