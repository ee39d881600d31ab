"""Files at addresses (s3://, gs://, hf://, https://): lists them, compares their etags, copies them to the host."""
