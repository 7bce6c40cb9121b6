"""Names and meanings of other frameworks over rlcore's engines, so that their users' programs run as they are."""
