"""Files at addresses (s3://, gs://, hf:// and https://): listing them, comparing their etags, and copying them to the
host."""
