"""Where checkpoints go: targets, what they are, and work folders that leave nothing behind and harm nothing.

`spec` reads what the user wrote, `path` turns it into a `Target`, `workfolder` makes the one folder that a
run writes into, and `clean` finds and removes what killed runs left. Nothing else deletes from a target.
"""
