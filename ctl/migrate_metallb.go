package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/internal/lb"
)

// metallbMove moves a cluster from MetalLB, or back.
type metallbMove struct {
	installer
	plan migrate.Plan
}

func (m *metallbMove) steps() []move {
	how := "on all nodes at once"
	if m.plan.NodeByNode {
		how = "one node after another"
	}
	return []move{
		{"check permissions and nodes", m.check},
		{"install Landfall, which announces nothing yet", m.installed},
		{"check that the API server takes all objects; copy Secrets", m.prepare},
		{"stop Landfall's controller until MetalLB's has ended", m.holdController},
		{"create the pools", m.createPools},
		{"swap the speakers " + how, m.swapSpeakers},
		{"swap the controllers", m.swapControllers},
		{"remove what was needed for the move only", m.settle},
	}
}

// prepare does all that may fail and that nobody notices, before anything else is done.
func (m *metallbMove) prepare(ctx context.Context) error {
	all := slices.Concat(m.plan.Quiet(), m.plan.Pools(), m.plan.Interim(), m.plan.Announcing())
	if err := m.create(ctx, all, true); err != nil {
		return err
	}
	for _, s := range m.plan.Secrets {
		if err := m.copySecret(ctx, s); err != nil {
			return err
		}
	}
	return m.create(ctx, m.plan.Quiet(), false)
}

func secretPath(namespace, name string) string {
	return "/api/v1/namespaces/" + namespace + "/secrets/" + name
}

func (m *metallbMove) copySecret(ctx context.Context, s migrate.SecretCopy) error {
	from, err := m.get(ctx, secretPath(s.Namespace, s.Name))
	if err != nil {
		return err
	}
	if from == nil {
		return fmt.Errorf("the Secret %s/%s with the password of a BGPPeer does not exist", s.Namespace, s.Name)
	}
	to := secretPath(m.choice.Namespace, s.Name)
	live, err := m.get(ctx, to)
	if err != nil {
		return err
	}
	if live != nil && text(live, "metadata", "labels", migrate.LabelFrom) == "" { // somebody has put it there
		if !reflect.DeepEqual(live["data"], from["data"]) {
			return fmt.Errorf("the Secret %s/%s exists already, and has another content than %s/%s: delete or rename one",
				m.choice.Namespace, s.Name, s.Namespace, s.Name)
		}
		return nil
	}
	return m.apply(ctx, to, map[string]any{"apiVersion": "v1", "kind": "Secret", "type": from["type"],
		"data": from["data"], "metadata": map[string]any{"name": s.Name, "namespace": m.choice.Namespace,
			"labels": map[string]any{migrate.LabelFrom: migrate.FromMetalLB}}}, false)
}

// deployments returns the path and the pods' labels of Landfall's controller.
func (m *metallbMove) deployments(ctx context.Context) (map[string]map[string]string, error) {
	list, err := m.list(ctx, appsPath+m.choice.Namespace+"/deployments", ourLabels)
	if err != nil {
		return nil, err
	}
	all := map[string]map[string]string{}
	for _, d := range list {
		raw, err := json.Marshal(d["spec"])
		var spec struct {
			Selector struct {
				MatchLabels map[string]string `json:"matchLabels"`
			} `json:"selector"`
		}
		if err := errors.Join(err, json.Unmarshal(raw, &spec)); err != nil {
			return nil, err
		}
		all[appsPath+m.choice.Namespace+"/deployments/"+name(d)] = spec.Selector.MatchLabels
	}
	return all, nil
}

// holdController stops Landfall's controller: two controllers must not assign addresses from the
// same pools. It does nothing when MetalLB's has been stopped already.
func (m *metallbMove) holdController(ctx context.Context) error {
	stopped, err := m.controllersStopped(ctx)
	if stopped || err != nil {
		return err
	}
	return m.stopOurController(ctx)
}

func (m *metallbMove) stopOurController(ctx context.Context) error {
	ours, err := m.deployments(ctx)
	if err != nil {
		return err
	}
	for path, labels := range ours {
		if err := m.change(ctx, path, migrate.Scale(0)); err != nil {
			return err
		}
		if err := m.noPods(ctx, m.choice.Namespace, labels, ""); err != nil {
			return err
		}
	}
	return nil
}

// controllersStopped reports whether MetalLB's controllers have no replicas.
func (m *metallbMove) controllersStopped(ctx context.Context) (bool, error) {
	for _, w := range m.plan.Controllers {
		live, err := m.get(ctx, workloadPath(w))
		if err != nil {
			return false, err
		}
		spec, _ := live["spec"].(map[string]any)
		if replicas, given := spec["replicas"].(float64); !given || replicas > 0 {
			return false, nil
		}
	}
	return true, nil
}

func (m *metallbMove) createPools(ctx context.Context) error {
	return m.create(ctx, m.plan.Pools(), false)
}

// swapSpeakers stops MetalLB's speakers, and has Landfall's announce when they have ended.
func (m *metallbMove) swapSpeakers(ctx context.Context) error {
	stopped, err := m.speakersStopped(ctx)
	if err != nil {
		return err
	}
	if stopped { // by an earlier run
		if err := m.speakersEnded(ctx, ""); err != nil {
			return err
		}
		return m.announce(ctx, m.plan.Announcing())
	}
	if m.plan.NodeByNode {
		return m.swapNodes(ctx)
	}
	if err := m.silence(ctx); err != nil {
		// Nobody announces now. Before somebody reads this, MetalLB does so again.
		back, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.wait)
		defer cancel()
		m.say("MetalLB's speakers are started again")
		if undone := m.speakersBack(back); undone != nil {
			return fmt.Errorf("%w; and no speaker announces: %w", err, undone)
		}
		return err
	}
	return m.announce(ctx, m.plan.Interim())
}

// pinTime is for how long other nodes wait with addresses that MetalLB announced from a node.
const pinTime = 10 * time.Second

// announce has Landfall announce: first each address that MetalLB announced from a node from there, so
// that no other node answers for it meanwhile, then all.
func (m *metallbMove) announce(ctx context.Context, all []migrate.Manifest) error {
	if pins := m.plan.Temporary(); len(pins) > 0 {
		if err := m.create(ctx, pins, false); err != nil {
			return err
		}
		patient := m.migrator
		patient.wait = min(m.wait, pinTime)
		// A node that does not deliver an address is no reason to leave it without one.
		if err := patient.until(ctx, "the nodes that MetalLB used announce", func() (string, error) {
			return m.unannounced(ctx, true)
		}); err != nil && ctx.Err() != nil {
			return err
		}
	}
	if err := m.create(ctx, all, false); err != nil {
		return err
	}
	return m.announced(ctx)
}

// silence ends MetalLB's speakers, with each address kept where it is announced.
func (m *metallbMove) silence(ctx context.Context) error {
	for _, pin := range m.plan.Pins {
		if err := m.label(ctx, serviceURI(pin.Service), migrate.LabelOwner, pin.Hostname); err != nil {
			return err
		}
	}
	if err := m.mute(ctx); err != nil {
		return err
	}
	for _, w := range m.plan.Speakers {
		if err := m.change(ctx, workloadPath(w), migrate.Stop()); err != nil {
			return err
		}
	}
	return m.speakersEnded(ctx, "")
}

func serviceURI(key lb.Key) string {
	return "/api/v1/namespaces/" + key.Namespace + "/services/" + key.Name
}

func (m *metallbMove) speakersStopped(ctx context.Context) (bool, error) {
	for _, w := range m.plan.Speakers {
		live, err := m.get(ctx, workloadPath(w))
		if err != nil {
			return false, err
		}
		if text(live, "spec", "template", "spec", "nodeSelector", migrate.LabelNode) != "never" {
			return false, nil
		}
	}
	return true, nil
}

func (m *metallbMove) speakersEnded(ctx context.Context, node string) error {
	for _, w := range m.plan.Speakers {
		if err := m.noPods(ctx, w.Namespace, w.Pods, node); err != nil {
			return fmt.Errorf("%s: %w", w, err)
		}
	}
	return nil
}

// muteTime is how long MetalLB's speakers have to read that they announce nothing. Some versions do
// not remove the status by which they say so, and clients wait meanwhile.
const muteTime = 2 * time.Second

// mute has MetalLB's speakers stop announcing on Layer 2 all at the same time. Else each that ends
// would leave its addresses to those that have not ended yet. It is only for that: nothing of
// Landfall announces before their pods are gone.
func (m *metallbMove) mute(ctx context.Context) error {
	for _, ad := range m.plan.L2 {
		uri := l2Path + "namespaces/" + ad.Metadata.Namespace + "/l2advertisements/" + ad.Metadata.Name
		if err := m.change(ctx, uri, migrate.Mute()); err != nil {
			return err
		}
	}
	patient := m.migrator
	patient.wait = min(m.wait, muteTime)
	err := patient.until(ctx, "MetalLB withdraws", func() (string, error) {
		owners, err := m.list(ctx, l2Path+"servicel2statuses", "")
		return strings.Repeat("an address is still announced", min(len(owners), 1)), err
	})
	if err != nil && ctx.Err() == nil {
		return nil
	}
	return err
}

// announced waits until Landfall announces all that MetalLB is known to have announced on Layer 2,
// and has said something of all else.
func (m *metallbMove) announced(ctx context.Context) error {
	return m.until(ctx, "Landfall announces the addresses", func() (string, error) { return m.unannounced(ctx, false) })
}

// unannounced says which Services Landfall does not announce of those that MetalLB is known to have
// announced on Layer 2, and, unless onlyPinned is set, of which others it has said nothing.
func (m *metallbMove) unannounced(ctx context.Context, onlyPinned bool) (string, error) {
	pinned := map[lb.Key]bool{}
	for _, pin := range m.plan.Pins {
		pinned[pin.Service] = true
	}
	services, err := m.list(ctx, servicesPath, "")
	var missing []string
	for _, o := range services {
		key := lb.Key{Namespace: text(o, "metadata", "namespace"), Name: name(o)}
		if len(m.plan.Held[key]) == 0 || onlyPinned && !pinned[key] {
			continue
		}
		if status, why := condition(o, "landfall.dev/Announced"); status == "" || status != "True" && pinned[key] {
			missing = append(missing, fmt.Sprintf("Service %s %s", key, why))
		}
	}
	return strings.Join(missing, ", "), err
}

// condition returns the status and the message of a condition.
func condition(o map[string]any, kind string) (status, message string) {
	inner, _ := o["status"].(map[string]any)
	conditions, _ := inner["conditions"].([]any)
	for _, c := range conditions {
		if text(c, "type") == kind {
			return text(c, "status"), text(c, "message")
		}
	}
	return "", "has no condition " + kind
}

// swapControllers stops MetalLB's controller, and starts Landfall's when it has ended.
func (m *metallbMove) swapControllers(ctx context.Context) error {
	for _, w := range m.plan.Controllers {
		if err := m.change(ctx, workloadPath(w), migrate.Scale(0)); err != nil {
			return err
		}
		if err := m.noPods(ctx, w.Namespace, w.Pods, ""); err != nil {
			return fmt.Errorf("%s: %w", w, err)
		}
	}
	ours, err := m.deployments(ctx)
	if err != nil {
		return err
	}
	for path := range ours {
		if err := m.revert(ctx, path); err != nil {
			return err
		}
	}
	if err := m.until(ctx, "Landfall's controller is ready", func() (string, error) { return m.ready(ctx) }); err != nil {
		return err
	}
	return m.until(ctx, "each Service keeps its addresses", func() (string, error) { return m.changed(ctx, true) })
}

// changed says which Services have other addresses than before, or are not confirmed by Landfall's
// controller.
func (m *metallbMove) changed(ctx context.Context, confirmed bool) (string, error) {
	services, err := m.list(ctx, servicesPath, "")
	var wrong []string
	for _, o := range services {
		key := lb.Key{Namespace: text(o, "metadata", "namespace"), Name: name(o)}
		want := m.plan.Held[key]
		if len(want) == 0 {
			continue
		}
		if has := ingressOf(o); !slices.Equal(has, want) {
			wrong = append(wrong, fmt.Sprintf("Service %s has %v, not %v", key, has, want))
		} else if status, why := condition(o, "landfall.dev/Assigned"); confirmed && status == "" {
			wrong = append(wrong, fmt.Sprintf("Service %s %s", key, why))
		}
	}
	return strings.Join(wrong, ", "), err
}

func ingressOf(o map[string]any) []netip.Addr {
	inner, _ := o["status"].(map[string]any)
	balancer, _ := inner["loadBalancer"].(map[string]any)
	ingress, _ := balancer["ingress"].([]any)
	var all []netip.Addr
	for _, in := range ingress {
		if addr, err := lb.ParseAddr(text(in, "ip")); err == nil {
			all = append(all, addr)
		}
	}
	return all
}

// settle removes what kept addresses on their nodes. They stay there: Landfall moves none without a
// reason.
func (m *metallbMove) settle(ctx context.Context) error {
	if err := m.create(ctx, m.plan.Announcing(), false); err != nil {
		return err
	}
	for _, o := range m.plan.Temporary() {
		if _, err := m.server.Send(ctx, http.MethodDelete, landfallPath(o.Kind)+"/"+o.Metadata.Name, "", nil); err != nil {
			return err
		}
	}
	for _, w := range m.plan.Speakers {
		if err := m.change(ctx, workloadPath(w), migrate.Stop()); err != nil {
			return err
		}
	}
	return m.unlabel(ctx)
}

// pinned returns the Services that are labelled to keep their addresses on a node. The label on others is not of a
// migration.
func (m *metallbMove) pinned(ctx context.Context) ([]lb.Key, error) {
	services, err := m.list(ctx, servicesPath, migrate.LabelOwner)
	var keys []lb.Key
	for _, o := range services {
		key := lb.Key{Namespace: text(o, "metadata", "namespace"), Name: name(o)}
		if slices.ContainsFunc(m.plan.Pins, func(p migrate.Pin) bool { return p.Service == key }) {
			keys = append(keys, key)
		}
	}
	return keys, err
}

// unlabel removes the labels of a migration from Services and Nodes.
func (m *metallbMove) unlabel(ctx context.Context) error {
	services, err := m.pinned(ctx)
	if err != nil {
		return err
	}
	for _, key := range services {
		if err := m.label(ctx, serviceURI(key), migrate.LabelOwner, ""); err != nil {
			return err
		}
	}
	return errors.Join(m.unlabelNodes(ctx, migrate.LabelNode, migrate.FromMetalLB),
		m.unlabelNodes(ctx, lb.LabelAnnouncedBy, migrate.FromMetalLB))
}

// undoSteps go back to MetalLB from wherever a migration is. Landfall stays installed, with nothing
// to announce.
func (m *metallbMove) undoSteps() []move {
	check := move{"check permissions", func(ctx context.Context) error { return m.permitted(ctx, m.needs()) }}
	if m.plan.NodeByNode {
		return []move{
			check,
			{"stop Landfall's controller", m.stopOurController},
			{"start MetalLB's controller", m.startControllers},
			{"swap the speakers back, one node after another", m.returnNodes},
			{"remove what announces for Landfall", m.withdraw},
			{"remove what kept MetalLB's speakers off nodes", m.restoreSpeakers},
			{"remove the objects, and start Landfall's controller, which has no pools", m.clean},
		}
	}
	return []move{
		check,
		{"stop Landfall's controller", m.stopOurController},
		{"start MetalLB's controller", m.startControllers},
		{"have Landfall end its BGP sessions", m.endSessions},
		{"start MetalLB's speakers, which announce nothing on Layer 2 yet", m.startSpeakers},
		{"have Landfall withdraw its addresses", m.withdraw},
		{"have MetalLB announce on Layer 2", m.unmuteSpeakers},
		{"remove the objects, and start Landfall's controller, which has no pools", m.clean},
	}
}

// endSessions leaves the sessions with routers to MetalLB's speakers, which start after it.
func (m *metallbMove) endSessions(ctx context.Context) error {
	return m.remove(ctx, "BGPAdvertisement", "BGPPeer")
}

func (m *metallbMove) withdraw(ctx context.Context) error {
	if err := m.remove(ctx, "L2Advertisement", "BGPAdvertisement", "BGPPeer"); err != nil {
		return err
	}
	return m.until(ctx, "Landfall's speakers withdraw", func() (string, error) {
		there, err := m.list(ctx, appsPath+m.choice.Namespace+"/daemonsets", ourLabels)
		if len(there) == 0 || err != nil {
			return "", err
		}
		services, err := m.list(ctx, servicesPath, "")
		var left []string
		for _, o := range services {
			key := lb.Key{Namespace: text(o, "metadata", "namespace"), Name: name(o)}
			if status, _ := condition(o, "landfall.dev/Announced"); status == "True" && len(m.plan.Held[key]) > 0 {
				left = append(left, "Service "+key.String())
			}
		}
		return strings.Join(left, ", "), err
	})
}

func (m *metallbMove) startControllers(ctx context.Context) error {
	for _, w := range m.plan.Controllers {
		if err := m.revert(ctx, workloadPath(w)); err != nil {
			return err
		}
	}
	return m.workloadsReady(ctx, m.plan.Controllers)
}

// startSpeakers starts MetalLB's speakers while Landfall announces, and waits until they are ready: by
// then, 10 s after their start with MetalLB's manifests, they have met. One that has not met the others
// yet takes all addresses for its own, so that two or three nodes would answer for each, one after the
// other, and connections would break.
func (m *metallbMove) startSpeakers(ctx context.Context) error {
	stopped, err := m.speakersStopped(ctx)
	if err != nil {
		return err
	}
	if stopped { // and muted by the same run, unless somebody has written the advertisements anew
		if err := m.eachL2(ctx, func(uri string) error { return m.change(ctx, uri, migrate.Mute()) }); err != nil {
			return err
		}
	}
	for _, w := range m.plan.Speakers {
		if err := m.revert(ctx, workloadPath(w)); err != nil {
			return err
		}
	}
	return m.workloadsReady(ctx, m.plan.Speakers)
}

// unmuteSpeakers has MetalLB's speakers announce on Layer 2.
func (m *metallbMove) unmuteSpeakers(ctx context.Context) error {
	if err := m.unlabel(ctx); err != nil {
		return err
	}
	return m.eachL2(ctx, func(uri string) error { return m.revert(ctx, uri) })
}

// eachL2 does something to each of MetalLB's L2Advertisements, once MetalLB's webhooks answer, which its
// controller serves.
func (m *metallbMove) eachL2(ctx context.Context, do func(uri string) error) error {
	for _, ad := range m.plan.L2 {
		uri := l2Path + "namespaces/" + ad.Metadata.Namespace + "/l2advertisements/" + ad.Metadata.Name
		err := m.until(ctx, "L2Advertisement "+ad.Metadata.Name, func() (string, error) { return "", do(uri) })
		if err != nil {
			return err
		}
	}
	return nil
}

// restoreSpeakers ends the labels of a move node by node, and what kept speakers off nodes.
func (m *metallbMove) restoreSpeakers(ctx context.Context) error {
	if err := m.unlabel(ctx); err != nil {
		return err
	}
	if err := m.speakersBack(ctx); err != nil {
		return err
	}
	return m.workloadsReady(ctx, m.plan.Speakers)
}

// speakersBack has MetalLB's speakers start and announce.
func (m *metallbMove) speakersBack(ctx context.Context) error {
	for _, w := range m.plan.Speakers {
		if err := m.revert(ctx, workloadPath(w)); err != nil {
			return err
		}
	}
	return m.eachL2(ctx, func(uri string) error { return m.revert(ctx, uri) })
}

func (m *metallbMove) clean(ctx context.Context) error {
	if err := m.remove(ctx, landfallKinds...); err != nil {
		return err
	}
	for _, s := range m.plan.Secrets {
		uri := secretPath(m.choice.Namespace, s.Name)
		live, err := m.get(ctx, uri)
		if err == nil && text(live, "metadata", "labels", migrate.LabelFrom) == migrate.FromMetalLB {
			_, err = m.server.Send(ctx, http.MethodDelete, uri, "", nil)
		}
		if err != nil {
			return err
		}
	}
	ours, err := m.deployments(ctx)
	if err != nil {
		return err
	}
	for path := range ours {
		if err := m.revert(ctx, path); err != nil {
			return err
		}
	}
	return nil
}

// show prints the plan.
func (m *metallbMove) show(w io.Writer) error {
	p := m.plan
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	line("From MetalLB to Landfall: %d Services keep their addresses.", len(p.Held))
	for _, b := range p.Blockers {
		line("\nFirst: %s", b)
	}
	line("\nHelm values (-o values):\n")
	values, err := yaml.Marshal(p.Values)
	if err != nil {
		return err
	}
	for text := range strings.Lines(string(values)) {
		out.WriteString("  " + text)
	}
	line("\nObjects (-o objects):\n")
	for _, o := range p.Objects {
		line("  %s %s", o.Kind, o.Metadata.Name)
	}
	for _, s := range p.Secrets {
		line("  Secret %s, a copy of %s/%s", s.Name, s.Namespace, s.Name)
	}
	if len(p.Notes) > 0 {
		line("\nNotes:\n")
	}
	for _, note := range p.Notes {
		prefix := ""
		if slices.Contains(p.Losses, note) {
			prefix = "lost: "
		}
		line("  - %s%s", prefix, note)
	}
	line("\nSteps of --apply; --undo goes back from each:\n")
	for i, s := range m.steps() {
		line("  %d. %s", i+1, s.what)
	}
	_, err = io.WriteString(w, out.String())
	return err
}

// farewell says what is left to do.
func (m *metallbMove) farewell(ctx context.Context) error {
	if missing, err := m.changed(ctx, false); missing != "" || err != nil {
		return errors.Join(err, fmt.Errorf("addresses: %s", missing))
	}
	fmt.Fprintf(m.out, "Done: %d Services have the addresses that they had. Check with landfallctl status; then remove "+
		"MetalLB.\n",
		len(m.plan.Held))
	return nil
}
