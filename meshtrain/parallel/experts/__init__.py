"""Mixture of experts over devices: tokens to the experts that they chose, and their outputs back."""
