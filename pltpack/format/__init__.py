"""Bytes and tables of archives (spec/format.md); knows nothing of what a codec means."""
