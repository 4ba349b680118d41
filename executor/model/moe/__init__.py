"""Mixture of experts: the layer, ways to move rows between ranks, ways to run experts."""
