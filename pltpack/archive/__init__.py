"""Archives: plan, write, read, append, compact, verify; ties trie, codecs, format and dumps together."""
