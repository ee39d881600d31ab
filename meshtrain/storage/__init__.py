"""Files at addresses, s3://, gs://, hf:// and https://: listed, compared by their etags, and copied to the host."""
