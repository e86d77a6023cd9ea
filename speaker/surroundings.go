package main

import (
	"context"
	"os"

	"github.com/spf13/pflag"
	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/speaker/surroundings"
)

// addNamespace adds --namespace.
func addNamespace(set *pflag.FlagSet, namespace *string) {
	where := os.Getenv("POD_NAMESPACE")
	if where == "" {
		where = "landfall-system"
	}
	set.StringVar(namespace, "namespace", where,
		"namespace of the Secrets with BGP passwords, of the speakers' Lease and of the ConfigMap "+
			lb.SurroundingsConfigMap+", in which speakers list their gateways (default: $POD_NAMESPACE, else landfall-system)")
}

// newSurroundings returns the actor that tells the controller of this node's gateways, and what all
// speakers have told.
func newSurroundings(client *kube.Client, rt *ops.Runtime, namespace string) (actor *surroundings.Surroundings) {
	shown := kube.Surroundings(client, namespace, func(string) { actor.Poke() })
	actor = surroundings.New(surroundings.Options{
		Node: rt.NodeName, Log: rt.Log,
		Gateways: func() ([]links.Gateway, error) { return links.Gateways(netns.None()) },
		Shown: func() (map[string]string, bool) {
			data, _ := shown.Get(lb.SurroundingsConfigMap)
			return data, shown.Synced()
		},
		Write: func(ctx context.Context, text string) error {
			return client.TellSurroundings(ctx, namespace, map[string]*string{rt.NodeName: &text})
		},
	})
	client.OnSync(actor.Poke)
	return actor
}
