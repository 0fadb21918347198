"""Attention: its spellings, masks, layouts, dropout, sinks; rows that see no key."""
