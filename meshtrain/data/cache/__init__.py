"""The token cache: text is tokenized once, in parts, by all hosts together."""
