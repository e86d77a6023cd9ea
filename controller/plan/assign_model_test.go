package plan

import (
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// modelInput is all that a decision depends on.
type modelInput struct {
	Config
	Pools      map[string]lb.Pool
	Namespaces map[string]lb.Namespace
	Nodes      map[string]lb.Node // whose addresses are not handed out
	Services   map[lb.Key]lb.Service
	Pending    map[lb.Key]Pending
	Now        time.Time
}

// assignModel decides for all Services at once, as a process does that has just started and knows
// only what is stored: a pure function. A Book that was told of each change must come to the same.
func assignModel(in modelInput) Plan {
	b := NewBook(in.Config, len(in.Services))
	b.SetPools(in.Pools, in.Nodes)
	b.SetNamespaces(in.Namespaces)
	for _, p := range in.Pools {
		b.Keep(p.Status.Released)
	}
	for key, s := range in.Services {
		b.Set(s, in.Pending[key], in.Now)
	}
	return b.Plan(in.Now)
}
