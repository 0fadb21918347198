"""Launch plans, the custom call, the compiled launcher, and what is compiled."""
