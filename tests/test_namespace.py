"""The keys of namespaces, which keep tenants apart."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from radixrt.messages import Namespace, tenant_of

TEXT = st.text("an\\\n\x1f0", max_size=4)
NAMESPACES = st.builds(Namespace, TEXT, TEXT, st.integers(0, 12), TEXT)


@given(NAMESPACES, NAMESPACES)
@example(Namespace("a", salt="b\nc"), Namespace("a\nb", salt="c"))
@example(Namespace("a\n"), Namespace("a\\n"))
@example(Namespace("a", "m", 1), Namespace("a", "m", salt="1"))
def test_no_two_namespaces_have_the_same_key(one, other):
    assert (one.key == other.key) == (one == other)


@given(NAMESPACES)
def test_a_key_gives_its_namespace_back(one):
    assert Namespace.of(one.key) == one and tenant_of(one.key) == one.tenant
