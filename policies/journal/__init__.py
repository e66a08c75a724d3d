"""The journal of a dispatcher: `codec` turns values into JSON, `lines` makes its lines, `replay` decides again."""
