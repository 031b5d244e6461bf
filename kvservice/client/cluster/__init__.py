"""Several daemons behind one face: `placement` has the rule, `members` watches the daemons, `core` places."""
