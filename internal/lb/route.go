package lb

// RouteKind says which route the kernel takes to an address.
type RouteKind int

// The kinds of routes.
const (
	RouteUnknown RouteKind = iota
	// RouteNone is no route, or one that refuses.
	RouteNone
	// RouteDefault is the route to everywhere.
	RouteDefault
	// RouteOwn is any other.
	RouteOwn
)
