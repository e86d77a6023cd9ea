package lb

// TunnelName returns the name of the interface over which a node passes packets of a family to
// nodes behind routers, see docs/design/rescue.md.
func TunnelName(family Family) string {
	if family == IPv6 {
		return "landfall6"
	}
	return "landfall4"
}

// IsTunnel reports whether an interface has the name of one of Landfall's own.
func IsTunnel(name string) bool { return name == TunnelName(IPv4) || name == TunnelName(IPv6) }
