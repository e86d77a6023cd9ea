package kube

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/landfall-lb/landfall/internal/actor"
)

// Passwords watches Secrets of type kubernetes.io/basic-auth by name, and keeps of each the
// password. There is a watch for each Secret, which RBAC can allow by name; others are not asked
// for. A Secret that the API server does not show counts as absent.
type Passwords struct {
	client    *Client
	namespace string
	named     func() map[string]bool
	changed   func(name string)
	poke      chan struct{}

	mu       sync.Mutex
	followed map[string]*followed
}

// followed is a Secret that is watched.
type followed struct {
	table *Table[string, string]
	watch *watch
	end   context.CancelFunc
}

var _ actor.Runner = (*Passwords)(nil)

// Passwords returns an actor for the Secrets in a namespace that named names. Poke it when that may
// return others; changed is called with the names of Secrets that have changed.
func (c *Client) Passwords(namespace string, named func() map[string]bool, changed func(name string)) *Passwords {
	return &Passwords{client: c, namespace: namespace, named: named, changed: changed, poke: make(chan struct{}, 1),
		followed: map[string]*followed{}}
}

// Poke has the actor look which Secrets are named now. It never blocks.
func (p *Passwords) Poke() {
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// Get returns the password in a Secret, and whether there is one. Before Synced, absent means
// unknown.
func (p *Passwords) Get(name string) (password string, ok bool) {
	p.mu.Lock()
	f := p.followed[name]
	p.mu.Unlock()
	if f == nil {
		return "", false
	}
	return f.table.Get(name)
}

// All returns the passwords by the names of their Secrets.
func (p *Passwords) All() map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string]string{}
	for name, f := range p.followed {
		if password, ok := f.table.Get(name); ok {
			all[name] = password
		}
	}
	return all
}

// Synced reports whether it is known of each Secret that is named now whether it is there.
func (p *Passwords) Synced() bool {
	named := p.named()
	p.mu.Lock()
	defer p.mu.Unlock()
	for name := range named {
		if f := p.followed[name]; f == nil || !f.table.Synced() {
			return false
		}
	}
	return true
}

// Busy returns for how long a watch has been handing on what it has heard.
func (p *Passwords) Busy() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	var longest time.Duration
	for _, f := range p.followed {
		longest = max(longest, f.watch.pulse.Busy())
	}
	return longest
}

// Run watches the Secrets that are named until ctx ends.
func (p *Passwords) Run(ctx context.Context) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	for {
		named := p.named()
		p.mu.Lock()
		for name, f := range p.followed {
			if !named[name] {
				f.end()
				delete(p.followed, name)
			}
		}
		for name := range named {
			if p.followed[name] == nil {
				f := p.follow(name)
				p.followed[name] = f
				life, end := context.WithCancel(ctx)
				f.end = end
				watching.Go(func() { f.watch.run(life) })
			}
		}
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-p.poke:
		}
	}
}

func (p *Passwords) follow(name string) *followed {
	table := newTable[string, string](nil, p.changed)
	selector := fields.AndSelectors(fields.OneTermEqualSelector("metadata.name", name),
		fields.OneTermEqualSelector("type", string(corev1.SecretTypeBasicAuth)))
	return &followed{table: table, watch: p.client.watch(resource{
		client: p.client.rest.core, name: "secrets", namespace: p.namespace, example: &corev1.Secret{},
		fieldSelector: selector.String(), optional: true,
	}, objects[string, string, *corev1.Secret]{table, func(o *corev1.Secret) (string, string) {
		return o.Name, string(o.Data[corev1.BasicAuthPasswordKey])
	}})}
}
