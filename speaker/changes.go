package main

import (
	"net/netip"
	"sync"

	"github.com/landfall-lb/landfall/internal/lb"
)

// changes collects what is to be planned again. Its marks are called from whatever goroutine has
// learned of a change.
type changes struct {
	poke  func() // for what comes in numbers: it may be folded
	now   func() // for what clients wait for, such as the loss of a node
	mu    sync.Mutex
	dirty dirt
}

// dirt names what has to be planned again.
type dirt struct {
	all      bool
	peers    bool            // the nodes that are to be met over gossip
	nodes    bool            // the nodes' addresses
	links    bool            // this node's interfaces
	routes   bool            // all that BGP peers hear
	status   bool            // what the status of objects for BGP shows
	ahead    bool            // which addresses Services get next
	services map[lb.Key]bool // Services whose set of VIPs may differ, too
	vips     map[netip.Addr]bool
}

func (c *changes) mark(f func(*dirt)) {
	c.note(f)
	c.poke()
}

func (c *changes) markNow(f func(*dirt)) {
	c.note(f)
	c.now()
}

func (c *changes) note(f func(*dirt)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.dirty)
}

func (c *changes) markAll() { c.markNow(func(d *dirt) { d.all = true }) }

// markLinks takes a change of some interface of this node.
func (c *changes) markLinks() { c.markNow(func(d *dirt) { d.links = true }) }

// markRoutes takes a change of an object that concerns BGP only.
func (c *changes) markRoutes(string) { c.mark(func(d *dirt) { d.routes = true }) }

// markStatus takes a change of the status of such an object, which changes no decision.
func (c *changes) markStatus(string) { c.mark(func(d *dirt) { d.status = true }) }

// markAhead takes a change of the status of a pool, which has the addresses that Services get next.
func (c *changes) markAhead(string) { c.mark(func(d *dirt) { d.ahead = true }) }

func (c *changes) markService(key lb.Key) {
	c.mark(func(d *dirt) {
		if d.services == nil {
			d.services = map[lb.Key]bool{}
		}
		d.services[key] = true
	})
}

// markVIPs marks some VIPs; nil stands for all.
func (c *changes) markVIPs(vips []netip.Addr) {
	if vips == nil {
		c.markAll()
		return
	}
	c.mark(func(d *dirt) {
		if d.vips == nil {
			d.vips = map[netip.Addr]bool{}
		}
		for _, vip := range vips {
			d.vips[vip] = true
		}
	})
}

// markNode takes a change of a Node: the others are to be met, also once this one (own is set) is there again. This one
// decides whether anything is claimed.
func (c *changes) markNode(own bool) {
	c.markNow(func(d *dirt) { d.all, d.peers, d.nodes = d.all || own, true, true })
}

// markSynced takes that some kind of object is known in full.
func (c *changes) markSynced() {
	c.markNow(func(d *dirt) { d.all, d.peers, d.nodes = true, true, true })
}

// takePeers reports whether the nodes that are to be met have changed since it was last called.
func (c *changes) takePeers() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	due := c.dirty.peers
	c.dirty.peers = false
	return due
}

// take returns what else has changed since it was last called.
func (c *changes) take() dirt {
	c.mu.Lock()
	defer c.mu.Unlock()
	dirty := c.dirty
	c.dirty = dirt{peers: dirty.peers}
	if dirty.vips == nil {
		dirty.vips = map[netip.Addr]bool{}
	}
	return dirty
}
