"""Jobs of clusters that start one launcher per node, written as their manifests."""
