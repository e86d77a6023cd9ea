package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/ctl/migrate"
)

// need is what a migration does with the objects of a kind. namespace is "" for all, or for
// cluster-scoped ones.
type need struct {
	verbs                      []string
	group, resource, namespace string
}

const reviewsPath = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

// permitted asks the API server whether the user may do all that the steps do: a migration that ends
// in the middle for the want of a permission is worse than none.
func (m *migrator) permitted(ctx context.Context, needs []need) error {
	var missing []string
	for _, n := range needs {
		var denied []string
		for _, verb := range n.verbs {
			allowed, err := m.allowed(ctx, n, verb)
			if err != nil {
				return err
			}
			if !allowed {
				denied = append(denied, verb)
			}
		}
		if len(denied) > 0 {
			rule := fmt.Sprintf("{apiGroups: [%q], resources: [%s], verbs: [%s]}", n.group, n.resource,
				strings.Join(denied, ", "))
			if n.namespace != "" {
				rule += " in the namespace " + n.namespace
			}
			missing = append(missing, rule)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("you need a role with the rules %s", strings.Join(missing, "; "))
	}
	return nil
}

func (m *migrator) allowed(ctx context.Context, n need, verb string) (bool, error) {
	resource, sub, _ := strings.Cut(n.resource, "/")
	body, err := json.Marshal(map[string]any{"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
		"spec": map[string]any{"resourceAttributes": map[string]any{"verb": verb, "group": n.group, "resource": resource,
			"subresource": sub, "namespace": n.namespace}}})
	if err != nil {
		return false, err
	}
	raw, err := m.server.Send(ctx, http.MethodPost, reviewsPath, "application/json", body)
	if err != nil {
		return false, err
	}
	var answer struct {
		Status struct {
			Allowed bool `json:"allowed"`
		} `json:"status"`
	}
	if err := json.Unmarshal(raw, &answer); err != nil {
		return false, fmt.Errorf("%s: %w", reviewsPath, err)
	}
	return answer.Status.Allowed, nil
}

// needs are the permissions for a move from MetalLB and back.
func (m *metallbMove) needs() []need {
	ours := m.choice.Namespace
	all := []need{
		{[]string{"list"}, "", "pods", ours},
		{[]string{"get", "list", "patch"}, "apps", "deployments", ours},
		{[]string{"list"}, "apps", "daemonsets", ours},
		{[]string{"list"}, "", "services", ""},
	}
	for _, kind := range landfallKinds {
		resource := landfallPath(kind)[strings.LastIndex(landfallPath(kind), "/")+1:]
		all = append(all, need{[]string{"get", "list", "create", "patch", "delete"}, "landfall.dev", resource, ""})
	}
	for _, w := range slices.Concat(m.plan.Speakers, m.plan.Controllers) {
		all = append(all, need{[]string{"get", "patch"}, "apps", strings.ToLower(w.Kind) + "s", w.Namespace},
			need{[]string{"list"}, "", "pods", w.Namespace})
	}
	for _, ad := range m.plan.L2 {
		all = append(all, need{[]string{"get", "patch"}, "metallb.io", "l2advertisements", ad.Metadata.Namespace})
	}
	if len(m.plan.Pins) > 0 {
		all = append(all, need{[]string{"get", "patch"}, "", "services", ""})
	}
	if m.plan.NodeByNode {
		all = append(all, need{[]string{"get", "list", "patch"}, "", "nodes", ""})
	}
	for _, s := range m.plan.Secrets {
		all = append(all, need{[]string{"get"}, "", "secrets", s.Namespace},
			need{[]string{"get", "create", "patch", "delete"}, "", "secrets", ours})
	}
	slices.SortFunc(all, func(a, b need) int {
		return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.resource, b.resource),
			cmp.Compare(a.namespace, b.namespace), slices.Compare(a.verbs, b.verbs))
	})
	return slices.CompactFunc(all, func(a, b need) bool {
		return a.group == b.group && a.resource == b.resource && a.namespace == b.namespace && slices.Equal(a.verbs, b.verbs)
	})
}

// needs are the permissions for a takeover from kube-proxy and back.
func (m *takeover) needs() []need {
	return []need{
		{[]string{"list"}, "", "pods", m.choice.Namespace},
		{[]string{"list"}, "apps", "daemonsets", m.choice.Namespace},
		{[]string{"get", "patch"}, "apps", "daemonsets", m.set.Namespace},
		{[]string{"get", "list", "create", "patch", "delete"}, "", "pods", m.set.Namespace},
		{[]string{"get", "list", "patch"}, "", "nodes", ""},
	}
}

// nodesReady refuses while the cluster has given up on a node: its pods do not end.
func (m *migrator) nodesReady(ctx context.Context, why string) error {
	nodes, err := m.list(ctx, nodesPath, "")
	if err != nil {
		return err
	}
	if down := migrate.NotReadyNodes(nodes); len(down) > 0 {
		return fmt.Errorf("not Ready: node %s: %s: bring it back, or delete the Node once it is off",
			strings.Join(down, ", "), why)
	}
	return nil
}

// check is all that has to be so before anything is changed.
func (m *metallbMove) check(ctx context.Context) error {
	if err := m.permitted(ctx, m.needs()); err != nil {
		return err
	}
	if stopped, err := m.speakersStopped(ctx); stopped || err != nil {
		return err // a speaker on such a node has no pod any more
	}
	return m.nodesReady(ctx, "MetalLB's speaker there cannot be stopped, and would keep addresses if it still runs")
}

// installed checks that what helm has installed, perhaps another time and with other values, can take
// over.
func (m *metallbMove) installed(ctx context.Context) error {
	if err := m.install(ctx); err != nil {
		return err
	}
	controllers, err := m.list(ctx, appsPath+m.choice.Namespace+"/deployments", ourLabels)
	if err != nil {
		return err
	}
	if len(controllers) == 0 {
		return fmt.Errorf("there is no controller of Landfall in the namespace %s: helm has not finished; run helm upgrade "+
			"--install with the values of -o values", m.choice.Namespace)
	}
	want, _ := m.plan.Values["loadBalancerClass"].(string)
	for _, o := range controllers {
		if class := flagIn(o, "load-balancer-class"); class != want {
			return fmt.Errorf("the loadBalancerClass of Landfall is %q, and that of MetalLB %q: helm upgrade %s CHART -n %s "+
				"--reset-then-reuse-values --set loadBalancerClass=%s", class, want, m.release, m.choice.Namespace, want)
		}
	}
	return m.secretsReadable(ctx)
}

// flagIn returns the value of a flag of the pods of a workload.
func flagIn(workload map[string]any, name string) string {
	spec, _ := workload["spec"].(map[string]any)
	value, _ := migrate.NewWorkload(migrate.Object{Spec: spec}).Flag(name)
	return value
}

// secretsReadable refuses if Landfall's roles do not have the Secrets of the sessions: these would
// never come up.
func (m *metallbMove) secretsReadable(ctx context.Context) error {
	if len(m.plan.Secrets) == 0 {
		return nil
	}
	roles, err := m.list(ctx, "/apis/rbac.authorization.k8s.io/v1/namespaces/"+m.choice.Namespace+"/roles", ourLabels)
	if err != nil || len(roles) == 0 {
		return nil // whoever may not read roles, or has made others, finds out by the sessions
	}
	rules, err := json.Marshal(roles)
	if err != nil {
		return err
	}
	var names []string
	for _, s := range m.plan.Secrets {
		names = append(names, s.Name)
		if !strings.Contains(string(rules), fmt.Sprintf("%q", s.Name)) {
			err = fmt.Errorf("the speakers of Landfall may not read the Secret %s: helm upgrade %s CHART -n %s "+
				"--reset-then-reuse-values --set", s.Name, m.release, m.choice.Namespace)
		}
	}
	if err != nil {
		return fmt.Errorf("%w 'speaker.bgpSecrets={%s}'", err, strings.Join(names, ","))
	}
	return nil
}

// moved reports whether an earlier run has come to its end. From then on Landfall's objects are the
// user's: another run must not write them again.
func (m *metallbMove) moved(ctx context.Context) (bool, error) {
	for _, stopped := range []func(context.Context) (bool, error){m.controllersStopped, m.speakersStopped} {
		if ok, err := stopped(ctx); !ok || err != nil {
			return false, err
		}
	}
	created := 0
	for _, kind := range []string{"L2Advertisement", "BGPAdvertisement"} {
		ads, err := m.list(ctx, landfallPath(kind), migrate.LabelFrom+"="+migrate.FromMetalLB)
		if err != nil {
			return false, err
		}
		created += len(ads)
	}
	left, err := m.left(ctx)
	return created > 0 && !left, err
}

// left reports whether there is anything that only a move that goes on needs.
func (m *metallbMove) left(ctx context.Context) (bool, error) {
	if services, err := m.pinned(ctx); len(services) > 0 || err != nil {
		return true, err
	}
	nodes, err := m.list(ctx, nodesPath, migrate.LabelNode+"="+migrate.FromMetalLB)
	if len(nodes) > 0 || err != nil {
		return true, err
	}
	for _, o := range m.plan.Temporary() {
		live, err := m.get(ctx, landfallPath(o.Kind)+"/"+o.Metadata.Name)
		if live != nil || err != nil {
			return true, err
		}
	}
	controllers, err := m.list(ctx, appsPath+m.choice.Namespace+"/deployments", ourLabels)
	for _, o := range controllers {
		if text(o, "metadata", "annotations", migrate.AnnotationUndo) != "" {
			return true, err
		}
	}
	return false, err
}
