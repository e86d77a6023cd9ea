// Flanneld carries packets between the pods of the cluster of e2e/cluster over VXLAN. It is flannel's
// own code without the backends that need the libraries of clouds.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/flannel-io/flannel/pkg/backend"
	_ "github.com/flannel-io/flannel/pkg/backend/vxlan"
	"github.com/flannel-io/flannel/pkg/ipmatch"
	"github.com/flannel-io/flannel/pkg/subnet/kube"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "flanneld:", err)
		os.Exit(1)
	}
}

func run() error {
	kubeconfig := flag.String("kubeconfig", "", "path of a kubeconfig")
	network := flag.String("net-config-path", "", "path of the network's configuration")
	iface := flag.String("iface", "eth0", "interface to the other nodes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	manager, err := kube.NewSubnetManager(ctx, "", *kubeconfig, "flannel.alpha.coreos.com", *network, false)
	if err != nil {
		return err
	}
	config, err := manager.GetNetworkConfig(ctx)
	if err != nil {
		return err
	}
	stack, err := ipmatch.GetIPFamily(config.EnableIPv4, config.EnableIPv6)
	if err != nil {
		return err
	}
	link, err := ipmatch.LookupExtIface(*iface, "", "", stack, ipmatch.PublicIPOpts{})
	if err != nil {
		return err
	}
	vxlan, err := backend.NewManager(ctx, manager, link).GetBackend(config.BackendType)
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	running, err := vxlan.RegisterNetwork(ctx, &group, config)
	if err != nil {
		return err
	}
	group.Go(func() { running.Run(ctx) })
	if err := manager.CompleteLease(ctx, running.Lease(), &group); err != nil {
		stop()
		group.Wait()
		return err
	}
	group.Wait()
	return nil
}
