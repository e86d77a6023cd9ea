package lb

// FeedNotice is one line (JSON, ended by a newline) that a speaker writes to its proxy over the feed's socket: all that it knows now,
// after which the one before counts no more. When the connection ends, nothing that was said over it counts any more.
type FeedNotice struct {
	// Dead are the nodes that have stopped answering the other speakers, and whose kernel answers nobody. Endpoints on them are
	// not delivered to (see Without). It is empty unless this node sees a majority of the speakers, so that a partition empties nothing.
	Dead []string `json:"dead"`
}

// Without returns the slices without the endpoints on dead nodes. A Service that would have none left keeps all of them.
func Without(all []Slice, dead map[string]bool) []Slice {
	if len(dead) == 0 {
		return all
	}
	left := make([]Slice, 0, len(all))
	some, dropped := false, false
	for _, slice := range all {
		var endpoints []Endpoint
		for _, ep := range slice.Endpoints {
			if dead[ep.Node] {
				dropped = true
				continue
			}
			endpoints = append(endpoints, ep)
			some = some || ep.Ready || ep.Serving && ep.Terminating
		}
		slice.Endpoints = endpoints
		left = append(left, slice)
	}
	if !dropped || !some {
		return all
	}
	return left
}
