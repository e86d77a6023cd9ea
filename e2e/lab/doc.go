// Package lab builds a cluster on one Linux machine, as root, that is real where it counts: etcd
// and a kube-apiserver, nodes, pods, a router and clients as network namespaces, and Landfall's own
// programs started as the chart's DaemonSet and Deployment would start them. It serves the
// demonstration and the end-to-end tests.
//
//	l, err := lab.Start(ctx, lab.SeedCluster(), lab.Options{})
//	defer l.Close()
//
// In a test, [github.com/landfall-lb/landfall/e2e/lab/labtest] does that, with logs shown on
// failure.
//
// # The network
//
// All of it is in network namespaces named after the lab and the host (lf1-k8s-worker-177), so that
// labs run side by side and touch nothing of the machine. A switch joins the nodes, the near client
// and the router; behind the router is the far client. With [Cluster.ToR] there are one or two
// routers that speak BGP with the nodes ([Lab.Routers]); with [Cluster.Racks] the nodes are in several
// networks, each with routers of its own behind a spine. On each node a bridge (cni0) joins its
// pods; routes between the nodes carry the pod network, unless [Cluster.CNI] says otherwise. There
// is no controller-manager: the lab itself creates Nodes, and writes the EndpointSlice of each
// Service that it has created
// ([Lab.AddService]) whenever a pod comes, goes or changes its conditions ([Lab.AddPod],
// [Lab.RemovePod], [Lab.SetConditions]). With [Cluster.DualStack] all of it has IPv6 too.
//
// # The agents
//
// The chart is rendered by helm and applied to the API server. Each container becomes a process on
// each node where a kubelet would start it, with the arguments, variables, volumes, user,
// capabilities and ServiceAccount of the rendered pod: a missing permission shows here. Folders of
// the pod and /run are private to the node. [Lab.Agent] starts, stops, kills and replaces them.
//
// # Traffic and faults
//
// [Lab.Dial], [Lab.Ask], [Lab.Spread], [Lab.Get] and [Lab.StartProbe] send traffic from any host;
// [Lab.Exec] runs a program on one. [Lab.Cut], [Lab.Unplug], [Lab.StopAPI] and [Agent.Kill] break
// things. [Lab.Rules] and [Lab.WatchRules] show a node's rules.
//
// # What is left behind
//
// Nothing, after [Lab.Close]. What a killed program leaves is removed at the next start, by the
// mark in the environment of each process that a lab starts and by the names of its namespaces; a
// lab whose owner lives is not touched.
package lab
