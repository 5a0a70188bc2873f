"""What methods are written against: the hooks, what they declare, see and send."""
