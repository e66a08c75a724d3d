"""Sluice and others under more load than their engines carry: what each keeps of its goodput, and for whom."""
